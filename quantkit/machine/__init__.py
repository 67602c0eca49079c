"""The machine: cores, devices and memory that this process may use."""
