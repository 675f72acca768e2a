"""What a simulation looks like: figures as JSON, tables and a timeline for the terminal, SVG, traces."""
