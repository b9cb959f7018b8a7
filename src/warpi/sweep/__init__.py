"""Many runs from one file: plan them, run the unfinished ones in several processes, compare the results."""
