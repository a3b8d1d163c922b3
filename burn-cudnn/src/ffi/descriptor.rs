//! Descriptors of cuDNN's backend API, which know what they are by their attributes.

use std::{ffi::c_void, ptr};

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind,
};

use super::functions::{Functions, Raw};

/// A descriptor. Those that its attributes name must live as long as it does.
pub(super) struct Descriptor {
    pub(super) raw: Raw,
    functions: &'static Functions,
}

// SAFETY: a descriptor has no thread of its own. After it was finalized it is only read.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

/// A type of attributes, whose values lie in memory as cuDNN expects those.
pub(super) trait Attribute: Copy {
    const TYPE: Type;
}

impl Attribute for i64 {
    const TYPE: Type = Type::CUDNN_TYPE_INT64;
}

impl Attribute for f32 {
    const TYPE: Type = Type::CUDNN_TYPE_FLOAT;
}

impl Attribute for u64 {
    /// An address on a device.
    const TYPE: Type = Type::CUDNN_TYPE_VOID_PTR;
}

/// A `cudnnBackendNumericalNote_t`.
#[derive(Clone, Copy, Default, PartialEq)]
#[repr(transparent)]
pub(super) struct Note(pub(super) u32);

impl Attribute for Note {
    const TYPE: Type = Type::CUDNN_TYPE_NUMERICAL_NOTE;
}

impl Descriptor {
    pub(super) fn new(functions: &'static Functions, kind: Kind) -> Result<Self, String> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is written to during the call.
        let status = unsafe { (functions.create_descriptor)(kind as i32, &raw mut raw) };
        functions.check(status, &format!("{kind:?}"))?;
        Ok(Self { raw, functions })
    }

    /// Sets an attribute.
    pub(super) fn set<T: Attribute>(&self, name: Name, values: &[T]) -> Result<(), String> {
        // SAFETY: the values are of that type.
        unsafe { self.set_raw(name, T::TYPE, values.len(), values.as_ptr().cast()) }
    }

    /// Sets an attribute that is a value of an enum.
    pub(super) fn set_choice(&self, name: Name, kind: Type, value: u32) -> Result<(), String> {
        // SAFETY: the value of an enum is a number of 32 bits.
        unsafe { self.set_raw(name, kind, 1, ptr::from_ref(&value).cast()) }
    }

    /// Sets an attribute that is a handle.
    pub(super) fn set_handle(&self, name: Name, handle: *mut c_void) -> Result<(), String> {
        // SAFETY: it is a handle, or the functions say that it is none.
        unsafe {
            self.set_raw(
                name,
                Type::CUDNN_TYPE_HANDLE,
                1,
                ptr::from_ref(&handle).cast(),
            )
        }
    }

    /// Sets an attribute that is another descriptor.
    pub(super) fn set_part(&self, name: Name, part: &Self) -> Result<(), String> {
        let kind = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        // SAFETY: it is a descriptor that is alive.
        unsafe { self.set_raw(name, kind, 1, ptr::from_ref(&part.raw).cast()) }
    }

    /// Sets an attribute that is a text.
    #[cfg(test)]
    pub(super) fn set_text(&self, name: Name, text: &str) -> Result<(), String> {
        // SAFETY: there are so many bytes.
        unsafe {
            self.set_raw(
                name,
                Type::CUDNN_TYPE_CHAR,
                text.len(),
                text.as_ptr().cast(),
            )
        }
    }

    /// # Safety
    ///
    /// There must be so many values, as cuDNN has them for that type.
    unsafe fn set_raw(
        &self,
        name: Name,
        kind: Type,
        count: usize,
        values: *const c_void,
    ) -> Result<(), String> {
        // SAFETY: the descriptor is alive. The values are read during the call, and are as this function's contract says.
        let status = unsafe {
            (self.functions.set)(self.raw, name as i32, kind as i32, count as i64, values)
        };
        self.functions.check(status, &format!("{name:?}"))
    }

    /// The values of an attribute, at most so many.
    pub(super) fn get<T: Attribute + Default>(
        &self,
        name: Name,
        most: usize,
    ) -> Result<Vec<T>, String> {
        let mut values = vec![T::default(); most];
        // SAFETY: there is room for so many values of that type.
        let count = unsafe { self.get_raw(name, T::TYPE, most, values.as_mut_ptr().cast()) }?;
        values.truncate(count);
        Ok(values)
    }

    /// Fills descriptors with those of an attribute, and returns those that were filled.
    pub(super) fn get_parts(&self, name: Name, mut parts: Vec<Self>) -> Result<Vec<Self>, String> {
        let mut raw: Vec<Raw> = parts.iter().map(|part| part.raw).collect();
        let kind = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        // SAFETY: there are so many descriptors. They are filled in place.
        let count = unsafe { self.get_raw(name, kind, raw.len(), raw.as_mut_ptr().cast()) }?;
        parts.truncate(count);
        Ok(parts)
    }

    /// # Safety
    ///
    /// There must be room for so many values, as cuDNN has them for that type.
    unsafe fn get_raw(
        &self,
        name: Name,
        kind: Type,
        most: usize,
        values: *mut c_void,
    ) -> Result<usize, String> {
        let (mut count, most) = (0, most as i64);
        let (name_, kind) = (name as i32, kind as i32);
        // SAFETY: the descriptor is alive. No more is written than there is room for, by this function's contract.
        let status =
            unsafe { (self.functions.get)(self.raw, name_, kind, most, &raw mut count, values) };
        self.functions.check(status, &format!("{name:?}"))?;
        Ok(count.clamp(0, most) as usize)
    }

    /// Ends the description.
    pub(super) fn finalized(self) -> Result<Self, String> {
        // SAFETY: the descriptor is alive, and so are those that it names.
        let status = unsafe { (self.functions.finalize)(self.raw) };
        self.functions.check(status, "cudnnBackendFinalize")?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: it was created by this library, and nothing uses it afterwards. An error cannot be handled here.
        let _ = unsafe { (self.functions.destroy_descriptor)(self.raw) };
    }
}
