//! Typed zeroed memory: buffers, scratch and the KV cache.

use std::{
    marker::PhantomData,
    ops::{Deref, DerefMut},
};

use super::memory::{Memory, Pages, Plain, cast, cast_mut};
use crate::{BackendError, Result};

/// Values that are zero at first. Untouched memory is not resident, and memory that cannot be had is an error, not an
/// abort.
pub(crate) struct Array<T> {
    memory: Memory,
    of: PhantomData<T>,
}

impl<T: Plain> Array<T> {
    /// As many values as the product of `lens`.
    pub fn new(what: &'static str, lens: &[usize]) -> Result<Self> {
        Self::in_pages(what, lens, Pages::Huge)
    }

    /// The same, in these pages.
    pub fn in_pages(what: &'static str, lens: &[usize], pages: Pages) -> Result<Self> {
        let bytes = lens.iter().try_fold(size_of::<T>(), |product, &len| product.checked_mul(len));
        let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?;
        Ok(Self { memory: Memory::new(what, bytes, pages)?, of: PhantomData })
    }
}

impl<T: Plain> Deref for Array<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        cast(self.memory.bytes())
    }
}

impl<T: Plain> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        cast_mut(self.memory.bytes_mut())
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn zeroed_writable_and_refused_when_absurd() {
        let mut values = Array::<f16>::new("a test", &[3, 5]).unwrap();
        assert_eq!(&*values, [f16::ZERO; 15]);
        values[14] = f16::ONE;
        assert_eq!(values[14], f16::ONE);
        assert!(Array::<f32>::new("a test", &[0, 5]).unwrap().is_empty());
        for lens in [&[usize::MAX, 2][..], &[1 << 60], &[1 << 50]] {
            let error = Array::<f32>::new("a test", lens).map(|_| ()).unwrap_err();
            assert!(matches!(error, BackendError::OutOfMemory { what: "a test", .. }), "{error}");
        }
    }
}
