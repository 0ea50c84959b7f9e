"""What a user would pick instead of ours, each a program that runs in an environment of its own."""
