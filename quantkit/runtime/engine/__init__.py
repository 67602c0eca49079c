"""Planning and running of the next step: scheduler, runner, speculation, graphs, and texts as they come."""
