"""The schedulers: a link to each, the choice among them, and what happens when one is lost."""
