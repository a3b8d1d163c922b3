//! NCCL's numbers for element types and operators (nccl.h; they have not changed since 2.0, and are part
//! of its binary interface).

use std::ffi::c_int;

use crate::{ElementType, ReduceOp};

/// How elements of a type are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wire {
    /// `ncclDataType_t`.
    pub(super) code: c_int,
    /// The size of one item, in bytes.
    pub(super) size: usize,
    /// The number of items that make up one element.
    pub(super) items: usize,
}

impl Wire {
    /// The size of `elements` elements, in bytes.
    pub(crate) fn bytes(&self, elements: usize) -> usize {
        elements * self.items * self.size
    }
}

const UINT8: c_int = 1;

/// How elements of a type are sent: as themselves, or as bytes if NCCL does not know the type. `None` if `reduces` and NCCL
/// does not know the type, because it cannot reduce bytes as elements of that type.
pub(crate) fn on_wire(dtype: ElementType, reduces: bool) -> Option<Wire> {
    let (code, size) = match dtype {
        ElementType::I8 => (0, 1),
        ElementType::U8 => (UINT8, 1),
        ElementType::I32 => (2, 4),
        ElementType::U32 => (3, 4),
        ElementType::I64 => (4, 8),
        ElementType::U64 => (5, 8),
        ElementType::F16 => (6, 2),
        ElementType::F32 => (7, 4),
        ElementType::F64 => (8, 8),
        ElementType::BF16 => (9, 2),
        ElementType::I16 | ElementType::U16 => {
            let bytes = Wire {
                code: UINT8,
                size: 1,
                items: 2,
            };
            return (!reduces).then_some(bytes);
        }
    };
    Some(Wire {
        code,
        size,
        items: 1,
    })
}

/// `ncclRedOp_t`.
pub(super) fn operator(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Mean => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strum::VariantArray;

    #[test]
    fn types_that_nccl_lacks_travel_as_bytes_and_are_not_reduced() {
        for &dtype in ElementType::VARIANTS {
            let moved = on_wire(dtype, false).expect("every type can be moved");
            let short = matches!(dtype, ElementType::I16 | ElementType::U16);
            assert_eq!(on_wire(dtype, true), (!short).then_some(moved));
            let digits = dtype
                .to_string()
                .trim_start_matches(char::is_alphabetic)
                .to_owned();
            assert_eq!(
                8 * moved.size * moved.items,
                digits.parse::<usize>().unwrap(),
                "{dtype}"
            );
        }
    }

    /// Compares the numbers with the bindings that were generated from NVIDIA's header.
    #[cfg(feature = "nccl")]
    #[test]
    fn numbers_are_those_of_the_header() {
        use cudarc::nccl::sys::{ncclDataType_t as Type, ncclRedOp_t as Op};
        let types = [
            (ElementType::I8, Type::ncclInt8),
            (ElementType::U8, Type::ncclUint8),
            (ElementType::I32, Type::ncclInt32),
            (ElementType::U32, Type::ncclUint32),
            (ElementType::I64, Type::ncclInt64),
            (ElementType::U64, Type::ncclUint64),
            (ElementType::F16, Type::ncclFloat16),
            (ElementType::F32, Type::ncclFloat32),
            (ElementType::F64, Type::ncclFloat64),
            (ElementType::BF16, Type::ncclBfloat16),
        ];
        for (dtype, theirs) in types {
            assert_eq!(on_wire(dtype, true).unwrap().code, theirs as c_int);
        }
        let operators = [
            (ReduceOp::Sum, Op::ncclSum),
            (ReduceOp::Product, Op::ncclProd),
            (ReduceOp::Max, Op::ncclMax),
            (ReduceOp::Min, Op::ncclMin),
            (ReduceOp::Mean, Op::ncclAvg),
        ];
        for (op, theirs) in operators {
            assert_eq!(operator(op), theirs as c_int);
        }
    }
}
