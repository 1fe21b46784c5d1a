//! placeholder: helper writes
