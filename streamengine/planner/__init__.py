"""What a fleet would do: our scheduler, pages and prefix cache in a virtual clock, steps and links by their times."""
