"""Crash points: does a checkpoint manager survive the death of its machine at *any* moment of a save?

`check_crashes(prepare, save, load)` runs a save in a child process, records every operation on its folder by tracing
system calls, and then builds *crash images*: the folder as it could look had the machine died after each operation.
Every image must load as exactly the old or the new state; once save has returned, as the new one.

What a disk may hold after a crash (ext4 or xfs, as weak as POSIX reasonably allows):

- What is written to a file is durable only after fsync or fdatasync of that file, through any descriptor. Until then it
  may be all there, all lost, cut short, of its new size but full of zeros, or, when old bytes were overwritten, a mix.
- Creating, renaming, linking and deleting change a *directory*, and are durable only after fsync of that directory.
  Until then the changes of one directory reach the disk in order, as a prefix; those of two directories in any order.
- A directory's changes may reach the disk before data that was written earlier: the empty file after a rename.
- fsync of a new file does not make its name durable. A rename is atomic: it happened or it did not; one between two
  directories belongs to the one it enters.

Where this stops: a bounded set of images at each point, not all of them, and of a save with more than 200 operations
or some megabytes a bounded set of points (the result says so); a save of more than 64 MB or 10,000 operations is
refused; writes tear in one place; modes, owners and extended attributes are not kept; files outside of the folder do
not crash; hooks of `atexit` do not run; sync_file_range counts as nothing. Writes
through shared memory (mmap), io_uring and cloned files are refused with an error, as is any save whose recorded
operations do not add up to what it left on disk. Student's code runs in children only and nothing of it is unpickled
here, but code that sets out to forge its own results can.
"""
