"""What pipeplan answered before its reorganisation, and whether it still does."""
