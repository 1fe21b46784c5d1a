//! Where the next payload block goes in a growing file.
