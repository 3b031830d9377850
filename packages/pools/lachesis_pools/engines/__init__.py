"""What starts workers: engines that place identical processes."""
