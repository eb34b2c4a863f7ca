"""Training of networks: recipes, batches, the loop, and many networks trained as one stack."""
