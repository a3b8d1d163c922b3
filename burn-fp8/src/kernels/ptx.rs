//! Inline PTX.

use cubecl::client::Client;

/// The compute capability of a device whose runtime compiles inline PTX, such as 90 for 9.0. Only CUDA's C++ backend does so
/// (feature `cuda-cpp`).
pub(in crate::kernels) fn capability(client: &Client) -> Option<u32> {
    #[cfg(feature = "cuda")]
    {
        use cubecl::cuda::compiler::CudaBackend;

        if CudaBackend::default() != CudaBackend::Cpp {
            return None;
        }
    }
    named(&client.properties().identity.fingerprint)
}

/// The capability in the name of the target that a device compiles for, such as `ptx_sm90`.
fn named(fingerprint: &str) -> Option<u32> {
    fingerprint.strip_prefix("ptx_sm")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_told_by_their_capability() {
        for (fingerprint, capability) in [
            ("ptx_sm80", Some(80)),
            ("ptx_sm90", Some(90)),
            ("ptx_sm120", Some(120)),
            ("sm_90", None),
            ("cpu", None),
            ("", None),
        ] {
            assert_eq!(named(fingerprint), capability, "{fingerprint}");
        }
    }
}
