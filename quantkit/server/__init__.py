"""The engine behind HTTP, in the shapes that OpenAI's clients speak. Needs `quantkit[serve]`."""
