//! A product in cuBLASLt's terms.

use burn::tensor::FloatDType;
use cudarc::cublaslt::{result, sys};

use super::{super::plan::Plan, text};
use crate::{Fp8Format, MatmulSpec};

/// The memory that an algorithm may use: what NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;
/// All addresses are multiples of this.
pub(super) const ALIGNMENT: u32 = 16;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// The device addresses of a product's tensors.
pub(super) struct Addresses {
    pub(super) lhs: u64,
    pub(super) rhs: u64,
    pub(super) lhs_factor: u64,
    pub(super) rhs_factor: u64,
    pub(super) workspace: u64,
    pub(super) bias: Option<u64>,
    pub(super) output: u64,
}

/// What is computed, and the layout of the matrices. They are stored by columns: our right side is the first operand, our left
/// side the second.
pub(super) struct Problem {
    pub(super) description: Description,
    pub(super) a: Layout,
    pub(super) b: Layout,
    pub(super) d: Layout,
}

impl Problem {
    pub(super) fn new(
        plan: &Plan,
        spec: MatmulSpec,
        addresses: &Addresses,
    ) -> Result<Self, String> {
        let (m, n, k) = (plan.m as u64, plan.n as u64, plan.k as u64);
        let output = output_type(spec.output);
        let description = Description::new()?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        description.set(
            Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
            &addresses.rhs_factor,
        )?;
        description.set(
            Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            &addresses.lhs_factor,
        )?;
        description.set(
            Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM,
            &i8::from(plan.fast),
        )?;
        if let Some(bias) = &addresses.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
            description.set(
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &(output as i32),
            )?;
        }
        Ok(Self {
            description,
            a: Layout::new(code_type(spec.rhs), k, n, plan.rhs.leading(plan.k))?,
            b: Layout::new(code_type(spec.lhs), k, m, plan.lhs.leading(plan.k))?,
            d: Layout::new(output, n, m, plan.n)?,
        })
    }
}

fn code_type(format: Fp8Format) -> sys::cudaDataType {
    match format {
        Fp8Format::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Fp8Format::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    }
}

pub(super) fn output_type(dtype: FloatDType) -> sys::cudaDataType {
    match dtype {
        FloatDType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        FloatDType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// A matrix, stored by columns.
pub(super) struct Layout(pub(super) sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(
        dtype: sys::cudaDataType,
        rows: u64,
        columns: u64,
        leading: usize,
    ) -> Result<Self, String> {
        result::create_matrix_layout(dtype, rows, columns, leading as i64)
            .map(Self)
            .map_err(text)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it was created by this library, and nothing uses it afterwards. An error cannot be handled here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What is computed, with sums and factors in f32.
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

/// What the heuristics may rely on.
pub(super) struct Preference(pub(super) sys::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn new() -> Result<Self, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref().map_err(text)?);
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &WORKSPACE,
        )?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, &ALIGNMENT)?;
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
