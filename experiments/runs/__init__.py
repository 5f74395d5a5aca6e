"""What a run of any experiment needs: its folder, its checkpoints, its console and its end."""
