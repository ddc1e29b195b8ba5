"""The workers: a link to each, what is known of each, and what runs on it."""
