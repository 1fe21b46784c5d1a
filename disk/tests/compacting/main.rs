//! Disks are compacted: their files become small, and nothing that counts is lost.
//!
//! - `real.rs`: file systems made and filled by their own tools, in images of every kind. Their own
//!   checkers find nothing wrong afterwards, each file is the same, and other programs agree.
//! - `model.rs`: random disks against a model.
//! - `live.rs`: disks in use.
//! - `rules.rs`: what is refused, what is left alone, and what does not change.
//!
//! A test whose tool is not installed prints `skipped:` with the tool's name.

mod lab;
mod live;
mod model;
mod real;
mod rules;
