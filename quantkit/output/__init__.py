"""Files that quantkit writes: tensors and folders appear whole or not at all, and only what is ours is replaced."""
