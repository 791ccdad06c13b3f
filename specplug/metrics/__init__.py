"""Task metrics, one file each: a function of (answer, reference) to a score between 0 and 1."""
