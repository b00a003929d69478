"""The search: for each tensor, the program that produces its words in the fewest bytes."""
