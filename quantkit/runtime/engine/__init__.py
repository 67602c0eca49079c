"""Who computes what in the next step: scheduler, runner, speculation, graphs, and texts as they come."""
