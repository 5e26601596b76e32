"""The sandboxes of stubs as the runtime has them: what it asks for, gives them, and sees from outside."""
