//! Which format a file has, and opening it.
