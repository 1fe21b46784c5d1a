//! placeholder: helper writes
/// How to lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LockMode {
    /// No lock.
    None,
    /// Readers share; writers are kept out.
    #[default]
    Shared,
    /// Alone.
    Exclusive,
}
