"""The facts about a kernel that Triton's interpreter sees."""
