"""What the folder of a model says before anything of it is loaded, and how a folder is come by."""
