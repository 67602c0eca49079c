"""Write files and folders atomically, and replace only files that quantkit wrote."""
