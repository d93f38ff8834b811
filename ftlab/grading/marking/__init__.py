"""From a submission to marks: the student's cells run in a sandbox, the graded ones in the grader, nbgrader notes both.

`sheet` says what there is to run and to judge; `play` is what runs in the sandbox, `playing` its other end; `judging`
runs the instructor's graded cells with the student's parts as bytes; `marking` does all of it for one notebook, and
`record` keeps the result. `preprocessors` puts it in the place of nbgrader's Execute; `intake`, `pool` and `grading`
are `ftlab grade`.
"""
