# One CMake target a room. A room sees another room's headers only by linking it, because each room's
# public include directory holds nothing but a link to that one room: "core/error.hpp" is found through
# build/rooms/core/core -> src/core. So the arrows of the design hold, or the build fails.

# longhalo_room(<name> [DIRECTORY <dir>] SOURCES <files...> [PUBLIC <targets...>] [PRIVATE <targets...>])
# A room without sources is header-only.
function(longhalo_room name)
  cmake_parse_arguments(ROOM "" "DIRECTORY" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  if(NOT ROOM_DIRECTORY)
    set(ROOM_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
  endif()
  set(door ${CMAKE_BINARY_DIR}/rooms/${name})
  file(MAKE_DIRECTORY ${door})
  file(CREATE_LINK ${ROOM_DIRECTORY} ${door}/${name} SYMBOLIC)
  set(target longhalo_${name})
  if(ROOM_SOURCES)
    add_library(${target} STATIC ${ROOM_SOURCES})
    target_include_directories(${target} PUBLIC ${door})
    target_link_libraries(${target} PUBLIC ${ROOM_PUBLIC} PRIVATE longhalo_warnings ${ROOM_PRIVATE})
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE ${door})
    target_link_libraries(${target} INTERFACE ${ROOM_PUBLIC})
  endif()
endfunction()
