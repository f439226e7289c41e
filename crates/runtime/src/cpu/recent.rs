//! A cache of a few values by key; the least recently used value is removed first.

/// A cache of up to `most` values.
pub(crate) struct Recent<K, V> {
    /// For each entry: time of its last use, key and value.
    entries: Vec<(u64, K, V)>,
    clock: u64,
    most: usize,
}

impl<K: PartialEq, V> Recent<K, V> {
    pub fn new(most: usize) -> Recent<K, V> {
        Recent { entries: Vec::new(), clock: 0, most }
    }

    /// Returns the value of a key, and marks it as used now.
    pub fn get(&mut self, key: &K) -> Option<&V> {
        self.clock += 1;
        let entry = self.entries.iter_mut().find(|(_, k, _)| k == key)?;
        entry.0 = self.clock;
        Some(&entry.2)
    }

    /// Adds a value; returns the least recently used value if it had to be removed.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.clock += 1;
        let oldest = (0..self.entries.len()).min_by_key(|&i| self.entries[i].0);
        let gone = oldest.filter(|_| self.entries.len() >= self.most).map(|i| self.entries.swap_remove(i).2);
        self.entries.push((self.clock, key, value));
        gone
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.iter().map(|(_, _, v)| v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let mut recent = Recent::new(2);
        assert_eq!(recent.insert(1, "a"), None);
        assert_eq!(recent.insert(2, "b"), None);
        assert_eq!(recent.get(&1), Some(&"a"));
        assert_eq!(recent.insert(3, "c"), Some("b"));
        assert_eq!([1, 2, 3].map(|key| recent.get(&key).copied()), [Some("a"), None, Some("c")]);
        assert_eq!(recent.values().count(), 2);
    }
}
