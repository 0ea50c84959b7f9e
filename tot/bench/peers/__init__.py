"""`tot bench peers`: the same branches and the same trees, here and in what a user would pick instead."""
