//! No cuBLASLt, in builds without the feature `cuda`.

use std::sync::Arc;

use burn_cubecl::CubeDevice;

use super::{operands::Operands, plan::Plan};
use crate::MatmulSpec;

/// What no device has.
pub(super) enum Library {}

impl Library {
    pub(super) fn has_refused(&self, _plan: &Plan, _spec: MatmulSpec) -> bool {
        match *self {}
    }
}

pub(super) fn library(_device: &CubeDevice) -> Option<Arc<Library>> {
    None
}

pub(super) fn run(
    library: &Library,
    _plan: &Plan,
    _spec: MatmulSpec,
    _operands: &Operands,
) -> Result<(), String> {
    match *library {}
}
