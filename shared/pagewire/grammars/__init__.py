"""Rules for grammars of structured output that scheduler and worker share."""
