"""What graders run on students' work: each tool judges behaviour, and says what went wrong in a student's words."""
