"""``pipeplan check``: verify a plan independently of what made it."""
