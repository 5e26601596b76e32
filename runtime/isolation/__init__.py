"""The sandbox and the limits of an instance, as the runtime plans them, enforces them and checks them from outside."""
