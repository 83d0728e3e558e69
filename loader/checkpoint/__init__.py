"""What is on disk: containers, families of names, and one file for each tool that writes them."""
