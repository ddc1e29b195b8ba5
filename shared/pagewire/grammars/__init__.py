"""What scheduler and worker agree on about grammars of structured output."""
