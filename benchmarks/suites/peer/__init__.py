"""Ways of calling add_sub in another process, all behind one `Peer`."""
