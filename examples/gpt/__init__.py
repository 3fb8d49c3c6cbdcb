"""What train_gpt.py trains, and on what: nothing in this folder knows about hpcomm."""
