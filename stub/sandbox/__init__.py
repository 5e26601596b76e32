"""What a stub gives up before anything foreign is imported: layers that it puts on itself, in order."""
