// What zinc_attn asks of Kompute's binding (kp) and finds there as kp.zinc_attn, included by its main.cpp.
//
// Sequences and operations of Kompute over a device, pipelines and buffers that are not its own. A handle of Vulkan is
// an integer in Python. Errors are those of kp_checked.hpp, but for `submit`, which returns the VkResult.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <kompute/Kompute.hpp>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#undef vkQueueSubmit

namespace zinc_attn {

namespace py = pybind11;

using Number = std::uint64_t;

template<typename Handle>
Number
number(Handle handle)
{
    return (Number)handle;
}

// An operation that has nothing to do before or after an evaluation.
class Op : public kp::OpBase
{
  public:
    void preEval(const vk::CommandBuffer&) override {}
    void postEval(const vk::CommandBuffer&) override {}
};

// What `source` stages wrote by `written` is there for `access` of `later` stages: flags of Vulkan.
class OpBarrier : public Op
{
  public:
    OpBarrier(uint32_t source, uint32_t written, uint32_t later, uint32_t access)
      : mSource(source)
      , mLater(later)
      , mBarrier{ VK_STRUCTURE_TYPE_MEMORY_BARRIER, nullptr, written, access }
    {
    }

    void record(const vk::CommandBuffer& commands) override
    {
        vkCmdPipelineBarrier(commands, mSource, mLater, 0, 1, &mBarrier, 0, nullptr, 0, nullptr);
    }

  private:
    uint32_t mSource, mLater;
    VkMemoryBarrier mBarrier;
};

// The begin of what a query pool of `count` timestamps is to time.
class OpResetTimestamps : public Op
{
  public:
    OpResetTimestamps(Number queries, uint32_t count)
      : mQueries((VkQueryPool)queries)
      , mCount(count)
    {
    }

    void record(const vk::CommandBuffer& commands) override { vkCmdResetQueryPool(commands, mQueries, 0, mCount); }

  private:
    VkQueryPool mQueries;
    uint32_t mCount;
};

// A dispatch of a pipeline that was compiled elsewhere, with the subgroup size that it asked for. Timestamps `mark` and
// `mark + 1` of `queries`, unless that is 0, are its begin and its end.
class OpDispatch : public Op
{
  public:
    OpDispatch(Number pipeline, Number layout, Number set, std::array<uint32_t, 3> groups, Number queries, uint32_t mark)
      : mPipeline((VkPipeline)pipeline)
      , mLayout((VkPipelineLayout)layout)
      , mSet((VkDescriptorSet)set)
      , mGroups(groups)
      , mQueries((VkQueryPool)queries)
      , mMark(mark)
    {
    }

    void record(const vk::CommandBuffer& commands) override
    {
        vkCmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, mPipeline);
        vkCmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, mLayout, 0, 1, &mSet, 0, nullptr);
        if (mQueries) {
            vkCmdWriteTimestamp(commands, VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT, mQueries, mMark);
        }
        vkCmdDispatch(commands, mGroups[0], mGroups[1], mGroups[2]);
        if (mQueries) {
            vkCmdWriteTimestamp(commands, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, mQueries, mMark + 1);
        }
    }

  private:
    VkPipeline mPipeline;
    VkPipelineLayout mLayout;
    VkDescriptorSet mSet;
    std::array<uint32_t, 3> mGroups;
    VkQueryPool mQueries;
    uint32_t mMark;
};

// Refuses the evaluation of a sequence that holds it unless `armed`: Kompute asks it before it submits.
class OpGuard : public Op
{
  public:
    bool armed = false;

    void record(const vk::CommandBuffer&) override {}

    void preEval(const vk::CommandBuffer&) override
    {
        if (!armed) {
            throw std::runtime_error("zinc_attn: this sequence holds a recorded call of attention, and nothing was "
                                     "prepared for it: evaluate it inside `with call.step():`, before call.close()");
        }
    }
};

// A friend of Kompute's classes.
struct Access
{
    // A manager over a device that it does not own, with one queue.
    static std::shared_ptr<kp::Manager> manager(Number instance, Number physical, Number device, Number queue, uint32_t family)
    {
        auto made = std::make_shared<kp::Manager>(std::make_shared<vk::Instance>((VkInstance)instance),
                                                  std::make_shared<vk::PhysicalDevice>((VkPhysicalDevice)physical),
                                                  std::make_shared<vk::Device>((VkDevice)device));
        made->mComputeQueues.push_back(std::make_shared<vk::Queue>((VkQueue)queue));
        made->mComputeQueueFamilyIndices.push_back(family);
        return made;
    }

    static bool isOpen(const kp::Manager& manager) { return manager.mDevice && manager.mInstance; }

    // (instance, physical device, device, first queue, its family) of an open manager.
    static py::tuple handles(const kp::Manager& manager)
    {
        return py::make_tuple(number((VkInstance)*manager.mInstance),
                              number((VkPhysicalDevice)*manager.mPhysicalDevice),
                              number((VkDevice)*manager.mDevice),
                              number((VkQueue)*manager.mComputeQueues.at(0)),
                              manager.mComputeQueueFamilyIndices.at(0));
    }

    // A sequence of an open manager. Where it is not destroyed by a call, its Vulkan objects are left: the device may
    // use them, or be gone.
    static std::shared_ptr<kp::Sequence> sequence(const kp::Manager& manager)
    {
        return { new kp::Sequence(manager.mPhysicalDevice,
                                  manager.mDevice,
                                  manager.mComputeQueues.at(0),
                                  manager.mComputeQueueFamilyIndices.at(0)),
                 [](kp::Sequence* sequence) {
                     if (!sequence->isInit()) {
                         delete sequence;
                     }
                 } };
    }

    // Why a call cannot be recorded into a host's sequence; empty: it can.
    static std::string refusal(const kp::Manager& manager, const kp::Sequence& sequence)
    {
        if (!sequence.isInit() || sequence.mDevice != manager.mDevice ||
            sequence.mQueueIndex != manager.mComputeQueueFamilyIndices.at(0)) {
            return "of another kp.Manager or queue, or one that was destroyed";
        }
        if (sequence.timestampQueryPool) {
            return "with timestamps, of which a call's operations take more than it has";
        }
        // begin() of a command buffer that has ended drops what it holds.
        return sequence.mRecording || sequence.mOperations.empty() ? "" : "that was evaluated, and cannot take more";
    }

    // (VkBuffer, bytes) of a tensor of the manager that was not destroyed, else (0, 0).
    static py::tuple buffer(const kp::Manager& manager, kp::Tensor& tensor)
    {
        if (tensor.mDevice != manager.mDevice || !tensor.mPrimaryBuffer) {
            return py::make_tuple(0, 0);
        }
        return py::make_tuple(number((VkBuffer)*tensor.mPrimaryBuffer), tensor.memorySize());
    }

    // The VkCommandBuffer of a sequence, recorded to its end.
    static Number commands(kp::Sequence& sequence)
    {
        sequence.end();
        return number((VkCommandBuffer)*sequence.mCommandBuffer);
    }

    // Submit command buffers, in order. Python's lock is held, as by Sequence::eval, so that threads of a host program,
    // which share its manager's queue, wait for each other.
    static int submit(Number queue, const std::vector<Number>& recorded, Number fence)
    {
        std::vector<VkCommandBuffer> commands;
        for (const Number one : recorded) {
            commands.push_back((VkCommandBuffer)one);
        }
        VkSubmitInfo info{};
        info.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO;
        info.commandBufferCount = static_cast<uint32_t>(commands.size());
        info.pCommandBuffers = commands.data();
        return vkQueueSubmit((VkQueue)queue, 1, &info, (VkFence)fence);
    }
};

template<typename Class, typename... Arguments>
py::class_<Class, kp::OpBase, std::shared_ptr<Class>>
bind_op(py::module_& m, const char* name)
{
    return py::class_<Class, kp::OpBase, std::shared_ptr<Class>>(m, name).def(py::init<Arguments...>());
}

inline void
bind(py::module_ m)
{
    bind_op<OpBarrier, uint32_t, uint32_t, uint32_t, uint32_t>(m, "OpBarrier");
    bind_op<OpResetTimestamps, Number, uint32_t>(m, "OpResetTimestamps");
    bind_op<OpDispatch, Number, Number, Number, std::array<uint32_t, 3>, Number, uint32_t>(m, "OpDispatch");
    bind_op<OpGuard>(m, "OpGuard").def_readwrite("armed", &OpGuard::armed);
    m.def("manager", &Access::manager);
    m.def("is_open", &Access::isOpen);
    m.def("handles", &Access::handles);
    m.def("sequence", &Access::sequence);
    m.def("refusal", &Access::refusal);
    m.def("commands", &Access::commands);
    m.def("buffer", &Access::buffer);
    m.def("submit", &Access::submit);
    m.attr("version") = 2;
}

}
