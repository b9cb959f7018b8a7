"""Many runs from one file: plan them, train the unfinished ones in several processes, and compare the results."""
