"""Help texts: a line for each option, or all that is known of it. Every command has them."""
