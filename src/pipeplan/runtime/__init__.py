"""Everything that imports torch: models, measuring them, and running plans."""
