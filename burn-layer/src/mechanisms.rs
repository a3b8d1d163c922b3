//! What computes some ops in place of the backend underneath: kernels of this crate, and NVIDIA's libraries.

use core::any::Any;
use parking_lot::RwLock;

/// At most one mechanism of each type. Each names the backend whose tensors it takes.
#[derive(Default)]
pub(crate) struct Mechanisms(RwLock<Vec<Box<dyn Any + Send + Sync>>>);

impl Mechanisms {
    /// Adds a mechanism, unless there is one of its type.
    #[cfg(any(feature = "cubecl", test))]
    pub(crate) fn add<T: Copy + Send + Sync + 'static>(&self, mechanism: T) {
        let mut mechanisms = self.0.write();
        if !mechanisms.iter().any(|known| known.is::<T>()) {
            mechanisms.push(Box::new(mechanism));
        }
    }

    /// The mechanism of that type, if there is one.
    pub(crate) fn get<T: Copy + 'static>(&self) -> Option<T> {
        let mechanisms = self.0.read();
        mechanisms
            .iter()
            .find_map(|known| known.downcast_ref().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_of_each_type() {
        let mechanisms = Mechanisms::default();
        assert_eq!(mechanisms.get::<u8>(), None);
        mechanisms.add(1u8);
        mechanisms.add(2u16);
        mechanisms.add(3u8);
        assert_eq!(mechanisms.get::<u8>(), Some(1));
        assert_eq!(mechanisms.get::<u16>(), Some(2));
        assert_eq!(mechanisms.get::<u32>(), None);
    }
}
