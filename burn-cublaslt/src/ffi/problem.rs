//! A product in cuBLASLt's terms.

use std::{ffi::c_void, ptr};

use cudarc::cublaslt::{result, sys};

use super::text;
use crate::{Element, Matrices, Order, Product};

/// The memory that an algorithm may use: what NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// `CUBLASLT_MATRIX_LAYOUT_BATCH_MODE`, and its `CUBLASLT_BATCH_MODE_POINTER_ARRAY`. Bindings to cuBLASLt before CUDA 12.9 have no name for
/// these, and bindings are made for the toolkit of the machine that builds.
const BATCH_MODE: u32 = 8;
const POINTER_ARRAY: u32 = 1;

/// The device addresses of a product's tensors, or of the arrays of [`Batches::Apart`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) lhs: u64,
    pub(super) rhs: u64,
    pub(super) output: u64,
    pub(super) workspace: u64,
}

/// The device addresses of what belongs to a problem's description. They are read when the product is computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Described {
    /// Of the left and the right side.
    pub(super) factors: Option<[u64; 2]>,
    pub(super) bias: Option<u64>,
}

impl Described {
    /// For the heuristics, for which it matters which addresses there are, not where. Allocations are aligned to as much.
    pub(super) fn somewhere(product: &Product) -> Self {
        let somewhere = 1 << 9;
        Self {
            factors: product.factors.then_some([somewhere; 2]),
            bias: product.bias.then_some(somewhere),
        }
    }
}

/// Where the matrices of a batch are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Batches {
    /// At equal distances.
    Strided,
    /// Anywhere. An array on the device has the address of each: `CUBLASLT_BATCH_MODE_POINTER_ARRAY`.
    Apart,
}

/// What is computed, and the layout of the matrices. cuBLASLt stores matrices by columns. So it is asked for the transpose
/// `Dᵀ = Bᵀ Aᵀ`: our right side is its first operand, our left side its second, and its result by columns is ours by rows.
pub(super) struct Problem {
    pub(super) description: Description,
    pub(super) a: Layout,
    pub(super) b: Layout,
    pub(super) d: Layout,
}

impl Problem {
    pub(super) fn new(
        product: &Product,
        described: &Described,
        batches: Batches,
    ) -> Result<Self, String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let description = Description::new()?;
        for (side, attribute) in [
            (&product.rhs, Attribute::CUBLASLT_MATMUL_DESC_TRANSA),
            (&product.lhs, Attribute::CUBLASLT_MATMUL_DESC_TRANSB),
        ] {
            if side.order == Order::Columns {
                description.set(attribute, &TRANSPOSED)?;
            }
        }
        if let Some([lhs, rhs]) = &described.factors {
            description.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, rhs)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, lhs)?;
        }
        if product.fast_accumulation {
            description.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
        }
        if let Some(bias) = &described.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            let dtype = element(product.output.element) as i32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &dtype)?;
        }
        let layout = |matrices| Layout::new(matrices, product.batches, batches);
        Ok(Self {
            description,
            a: layout(&product.rhs)?,
            b: layout(&product.lhs)?,
            d: layout(&product.output)?,
        })
    }
}

fn element(element: Element) -> sys::cudaDataType {
    match element {
        Element::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Element::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
        Element::BF16 => sys::cudaDataType::CUDA_R_16BF,
        Element::F16 => sys::cudaDataType::CUDA_R_16F,
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
    }
}

/// Matrices, stored by columns.
pub(super) struct Layout(pub(super) sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(matrices: &Matrices, count: usize, batches: Batches) -> Result<Self, String> {
        let (rows, columns) = match matrices.order {
            Order::Rows => (matrices.columns, matrices.rows),
            Order::Columns => (matrices.rows, matrices.columns),
        };
        let element = element(matrices.element);
        let leading = matrices.leading as i64;
        let layout = result::create_matrix_layout(element, rows as u64, columns as u64, leading);
        let layout = layout.map(Self).map_err(text)?;
        if count > 1 {
            use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
            let count = count as i32;
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
            if batches == Batches::Apart {
                layout.set_by_number(BATCH_MODE, &POINTER_ARRAY)?;
                return Ok(layout);
            }
            let stride = matrices.stride as i64;
            let distance = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            layout.set(distance, &stride)?;
        }
        Ok(layout)
    }

    /// Sets an attribute, whose type must be the one in cuBLASLt's documentation. A wrong size is an error.
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatrixLayoutAttribute_t,
        value: &T,
    ) -> Result<(), String> {
        let (value, size) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the layout is alive. The value is read during the call, and no further than its size.
        let set = unsafe { result::set_matrix_layout_attribute(self.0, attribute, value, size) };
        set.map_err(|error| format!("{attribute:?}: {error}"))
    }

    /// The same for an attribute by its number. A library that does not have it says so.
    fn set_by_number<T: Copy>(&self, attribute: u32, value: &T) -> Result<(), String> {
        type Set =
            unsafe extern "C" fn(sys::cublasLtMatrixLayout_t, u32, *const c_void, usize) -> u32;
        // SAFETY: the function is of this type: an enum of C is a number of 32 bits. The library stays loaded.
        let set = unsafe { sys::culib().get::<Set>(b"cublasLtMatrixLayoutSetAttribute\0") };
        let set = set.map_err(text)?;
        // SAFETY: as above.
        match unsafe {
            set(
                self.0,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        } {
            0 => Ok(()),
            status => Err(format!(
                "attribute {attribute} of a layout: status {status}"
            )),
        }
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it was created by this library, and nothing uses it afterwards. An error cannot be handled here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What is computed, with sums in f32.
pub(super) struct Description(pub(super) sys::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self, String> {
        let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        result::create_matmul_desc(sums, sys::cudaDataType::CUDA_R_32F)
            .map(Self)
            .map_err(text)
    }

    /// Sets an attribute, whose type must be the one in cuBLASLt's documentation. A wrong size is an error.
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), String> {
        let (value, size) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the description is alive. The value is read during the call, and no further than its size.
        let set = unsafe { result::set_matmul_desc_attribute(self.0, attribute, value, size) };
        set.map_err(|error| format!("{attribute:?}: {error}"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: as for a layout.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// What an algorithm may use.
pub(super) struct Preference(pub(super) sys::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn new(alignment: u32) -> Result<Self, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref().map_err(text)?);
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &WORKSPACE,
        )?;
        // Where the terms of a sum are shared out, the partial sums are added up in f32 too. By default they may be in the output's
        // 16 bits.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            &scheme,
        )?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, &alignment)?;
        }
        Ok(preference)
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), String> {
        let (value, size) = (std::ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the preference is alive. The value is read during the call, and no further than its size.
        let set = unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, size) };
        set.map_err(|error| format!("{attribute:?}: {error}"))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as for a layout.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
