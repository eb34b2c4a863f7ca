"""What a blend needs beside its members: randomised trees as arrays, and weights for what each member says."""
