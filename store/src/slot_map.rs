//! A table of values with stable indices: requests in flight, connections, mailboxes.

/// A table of values with stable indices. The index of a removed value is reused, so a user that
/// must recognise an old index adds a generation of its own.
#[derive(Debug)]
pub struct SlotMap<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for SlotMap<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> SlotMap<T> {
    /// Adds a value, and returns its index.
    ///
    /// # Panics
    /// With 2^32 values.
    #[inline]
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = Some(value);
            return index;
        }
        self.slots.push(Some(value));
        u32::try_from(self.slots.len() - 1).expect("memory holds fewer than 2^32 entries")
    }

    /// The value at `index`.
    #[inline]
    pub fn get(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.as_ref()
    }

    /// The value at `index`, to change it.
    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    /// Takes the value at `index` out, and frees the index.
    #[inline]
    pub fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(value)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Indices of all values, ascending.
    pub fn indices(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.slots).filter(|(_, slot)| slot.is_some()).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_reused_and_never_shared() {
        let mut map = SlotMap::default();
        assert!(map.is_empty());
        let (a, b) = (map.insert('a'), map.insert('b'));
        assert_eq!((map.remove(a), map.remove(a), map.len()), (Some('a'), None, 1));
        let c = map.insert('c');
        assert_eq!((c, map.get(c), map.get(b), map.get(9)), (a, Some(&'c'), Some(&'b'), None));
        *map.get_mut(c).unwrap() = 'd';
        assert_eq!(map.get(c), Some(&'d'));
        assert_eq!(map.get_mut(9), None);
        assert_eq!(map.indices().collect::<Vec<_>>(), [a, b]);
    }
}
