"""Has what both ends of a run of source share: values, and folders that somebody else has filled."""
