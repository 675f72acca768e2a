"""What a plan does in time: event simulation, metrics, memory, critical path."""
