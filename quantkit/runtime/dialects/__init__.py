"""How chat models write tool calls and thinking: one YAML file per dialect, and one reader of their answers."""
